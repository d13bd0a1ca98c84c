# SPDX-License-Identifier: Apache-2.0
"""One layer's attention, ours against vLLM's."""
