# SPDX-License-Identifier: Apache-2.0
"""``h2o-serve``: vLLM's OpenAI server with KV budgets per request and a report in every response.

====================== ========================================================================
``cli``                the command: vLLM's parser plus our option group
``serve``              puts our configuration into vLLM's arguments
``launch``             runs vLLM's server with them and ends it cleanly
``asgi``               the same application under a server that is there already
``greeting``           what a server says when it is up
``access``             asks for ``--api-key`` where vLLM would not
``engine_death``       tells an engine that died from one that was stopped, for the exit code
``routes``             which HTTP routes take the budget fields, and which must refuse them
``protocol``           the body of a request: parse, check, move the fields to where vLLM reads them
``system_prefix``      the system messages and tools of a chat, and the tokens they become
``admission``          the one step before vLLM's engine client: checks, counts, takes the reports
``report``             the ``kv_cache`` object: from the engine's reports to what a client reads
``report_injection``   puts that object into a JSON body or an event stream
``openapi``            the budget fields on the server's API page
``config_route``       ``GET /plugins/h2o/config``: what this server does and accepts
``playground/``        the page ``/h2o/``: see what is kept, compare answers
``middleware``         the ASGI layer that ties these together, in every API-server process
====================== ========================================================================

Importing this package imports nothing.
"""
