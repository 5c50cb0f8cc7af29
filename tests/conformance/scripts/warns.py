import warnings


def old():
    warnings.warn("old is old", DeprecationWarning, stacklevel=2)
    warnings.warn("pending", PendingDeprecationWarning, stacklevel=1)
    warnings.warn("for the user", UserWarning, stacklevel=2)


old()
old()
"\d"
open(__file__)
