import sys

import package

print(__name__, __file__, __spec__.name, __spec__.parent, __package__, sys.argv, package.__path__, sys.path[0])
