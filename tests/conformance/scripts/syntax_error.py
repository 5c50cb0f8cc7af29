print("never printed")
def broken(:
