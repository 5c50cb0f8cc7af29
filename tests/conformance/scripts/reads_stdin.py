import sys

print(input("name? "))
print(sys.stdin.readline())
print(repr(sys.stdin.buffer.read()))
try:
    input()
except EOFError as error:
    print("end of file", error)
