# SPDX-License-Identifier: Apache-2.0
"""What all rooms of the load tests share. Knows none of them.

results, machine            files of rows, and what a row has to be read with
statistics, tables          numbers, Markdown
servers, client, prometheus servers that are started, asked and watched
child, measuring, command   measuring processes, what is left to measure, command lines
texts, tiny_model           what is sent, and a model for tests
forced                      what an engine is made to say
"""
