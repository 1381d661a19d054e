"""Packages of the distribution. Everything else that describes it is in pyproject.toml."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["sparselift", "sparselift.*"]), "sparselift.tuning"],
    package_dir={"sparselift.tuning": "tuning"},
    package_data={"sparselift": ["py.typed"]},
    include_package_data=False,
    zip_safe=False,
)
