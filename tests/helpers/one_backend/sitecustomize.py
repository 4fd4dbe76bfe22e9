"""Let a program see no framework but the one it runs on, as where no other is installed.

Python imports this module at its start when this folder is on its search path. Keras imports JAX,
scikit-learn and, to set a seed, TensorFlow wherever it finds them, whichever back end it runs on. Each rank
of each job would spend seconds on them, most of its life.
"""

import os
import sys

backend = os.environ.get("KERAS_BACKEND", "tensorflow")
sys.modules.update(dict.fromkeys({"tensorflow", "jax", "sklearn"} - {backend}))
