import sys

print(__name__, __file__, __spec__, sys.argv, sys.path[0])
