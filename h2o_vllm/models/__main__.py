# SPDX-License-Identifier: Apache-2.0
"""``python -m h2o_vllm.models``: prepare the default model if necessary, and print its directory.

Only the path goes to stdout, so that a shell can use it; progress and errors go to stderr. The server formats
errors itself, and calls this with ``--errors-to-stdout``.
"""

import sys

from h2o_vllm.errors import ConfigError
from h2o_vllm.models.default import prepare_default_model


def main() -> int:
    """Print the directory; 0 if it is ready to be served, 1 after a clear error."""
    try:
        directory = prepare_default_model()
    except ConfigError as error:
        if "--errors-to-stdout" in sys.argv[1:]:
            print(error)
        else:
            print(f"h2o_vllm: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    print(directory)
    return 0


if __name__ == "__main__":
    sys.exit(main())
