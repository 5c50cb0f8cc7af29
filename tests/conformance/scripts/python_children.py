import subprocess
import sys

print("parent", flush=True)
program = "import sys; print(sys.argv, sys.path, 'sitecustomize' in sys.modules, len(sys.modules))"
for options in ([], ["-u"], ["-I"], ["-E"], ["-s"]):
    subprocess.run([sys.executable, *options, "-c", program, "argument"], check=True)
print(subprocess.run([sys.executable, "-c", "raise SystemExit(5)"]).returncode)
print(subprocess.run([sys.executable, "absent.py"], stderr=subprocess.PIPE).stderr)
