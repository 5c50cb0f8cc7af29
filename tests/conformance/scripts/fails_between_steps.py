import sys

from training import train


def fail(number):
    if number == 3:
        with open("notes.txt", "w") as file:
            file.write("before the end\n")
        if sys.argv[1] == "exit":
            sys.exit("the third step is enough")
        raise RuntimeError("between two steps")


train(before=fail)
