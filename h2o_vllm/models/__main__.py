# SPDX-License-Identifier: Apache-2.0
"""``python -m h2o_vllm.models``: print the default model's directory, preparing it if need be.

Only the path goes to stdout, so that a shell can use it; progress and errors go to stderr.
"""

import sys

from h2o_vllm.errors import ConfigError
from h2o_vllm.models import default_model_dir


def main() -> int:
    """Print the directory; 0 if it is ready to be served, 1 after a clear error."""
    try:
        directory = default_model_dir()
    except ConfigError as error:
        print(f"h2o_vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
