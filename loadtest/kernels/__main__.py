# SPDX-License-Identifier: Apache-2.0
"""``python -m loadtest.kernels``: see :mod:`loadtest.kernels.bench`."""

from loadtest.kernels.bench import main

if __name__ == "__main__":
    main()
