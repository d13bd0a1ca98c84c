# SPDX-License-Identifier: Apache-2.0
"""What all rooms of the load tests share. Knows none of them.

results, machine            files of rows, and what a row has to be read with
statistics, tables, plots   numbers, Markdown, PNG
servers, client, prometheus servers that are started, asked and watched
child                       measuring processes
settings                    options that are environment variables too
texts, tiny_model           what is sent, and a model for tests
forced                      what an engine is made to say
"""
