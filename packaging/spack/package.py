"""Spack package of nnlo: copy it to `packages/py_nnlo/package.py` of a repository of your own."""

from spack.package import *
from spack_repo.builtin.build_systems.python import PythonPackage


class PyNnlo(PythonPackage):
    """Distributed training and optimisation over MPI as plug-ins for Keras and PyTorch."""

    homepage = "https://github.com/nnlo/nnlo"
    git = "https://github.com/nnlo/nnlo.git"
    pypi = "nnlo/nnlo-0.1.0.tar.gz"

    license("Apache-2.0")

    version("main", branch="main")
    # With the release comes version("0.1.0", sha256=...): spack checksum py-nnlo 0.1.0

    variant("torch", default=False, description="Train PyTorch models")
    variant("keras", default=False, description="Train Keras models; add a back end")
    variant("hdf5", default=False, description="Read lists of HDF5 files")
    variant("yaml", default=False, description="Read YAML files of options")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling", type="build")
    depends_on("py-numpy@2.0:", type=("build", "run"))
    depends_on("py-threadpoolctl@3.2:", type=("build", "run"))
    depends_on("py-tomli-w@1.0:", type=("build", "run"))
    depends_on("py-mpi4py@4.1:", type=("build", "run"))
    depends_on("py-torch@2.4:", when="+torch", type=("build", "run"))
    depends_on("py-keras@3.7:", when="+keras", type=("build", "run"))
    depends_on("py-h5py@3.12.1:", when="+hdf5", type=("build", "run"))
    depends_on("py-pyyaml@6:", when="+yaml", type=("build", "run"))

    import_modules = ["nnlo_common"]
