"""Import paths of older programs: `table.py` lists them, `finder.py` serves them on first import.

Nothing else in the package imports from here.  The other files hold the few functions that only those paths have.
"""
