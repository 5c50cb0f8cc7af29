import sys

sys.stdout.write("é ü 漢 \N{SNOWMAN}\n")
sys.stdout.write("x" * 300_000)
sys.stderr.write("interleaved\n")
sys.stdout.buffer.write(bytes(range(256)))
print("last")
