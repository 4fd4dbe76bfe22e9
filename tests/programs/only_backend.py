"""Make Keras see no TensorFlow that it does not run on, as where none is installed.

`keras.utils.set_random_seed` imports it wherever it can, which takes each rank of a job seconds.
"""

import sys

import keras

# Tests import from here, too, and some of them are about TensorFlow's data beside another back end.
if keras.backend.backend() != "tensorflow" and "pytest" not in sys.modules:
    sys.modules.setdefault("tensorflow", None)
