import os

print(os.read(63, 100))
