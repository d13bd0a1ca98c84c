# SPDX-License-Identifier: Apache-2.0
"""``python -m loadtest.engine``: see :mod:`loadtest.engine.bench`."""

from loadtest.engine.bench import main

if __name__ == "__main__":
    main()
