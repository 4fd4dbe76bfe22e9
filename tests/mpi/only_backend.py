"""Make Keras see no TensorFlow that it does not run on, as where none is installed.

`keras.utils.set_random_seed` imports it wherever it can, which takes each rank of a job seconds.
"""

import sys

import keras

if keras.backend.backend() != "tensorflow":
    sys.modules.setdefault("tensorflow", None)
