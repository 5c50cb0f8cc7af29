def inner(count):
    if count:
        return inner(count - 1)
    return {}["absent"]


def outer():
    try:
        inner(5)
    except KeyError as error:
        raise ValueError("chained\nover two lines") from error


print("before")
outer()
