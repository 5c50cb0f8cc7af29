import sys

print("package", __name__, __file__, sys.argv[0])
