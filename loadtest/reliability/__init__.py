# SPDX-License-Identifier: Apache-2.0
"""Does it last, and is it right under load: a soak and a hunt for silent corruption.

soak: traffic, trend                         a server under hours of mixed load; what grows
corruption: request_mix, corruption_check    a batch against each of its requests alone
poison, planted_bugs                         what makes corruption show; bugs that must be found
async_cpu, exact_linear                      asynchronous scheduling and exact arithmetic on CPU
"""
