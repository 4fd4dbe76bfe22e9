"""Tools for every other room: errors, the flat vector and its layout, state trees, files, arguments.

Holds: one exception tree, float32 vectors for whole models, exact saving of objects, the opening of
files, the limits of their content, atomic file writes, the JSON codec of messages, argument checks, signals,
random states, large pages, the folder lock, the cores of this process.
May import: NumPy and the standard library.
Must not know: any other room.
"""
