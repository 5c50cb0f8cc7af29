import sys

print("about to leave")
sys.exit(eval(sys.argv[1]))
