# SPDX-License-Identifier: Apache-2.0
"""Before somebody buys GPUs: simulations of the real scheduler on a model of step times.

``lengths``, ``traffic``   what is asked: lengths, arrivals, budgets
``shapes``, ``gpus``       what serves: a model's sizes, a GPU's datasheet
``memory``                 blocks of the pool
``work``                   what a step computes, counted where it is decided
``roofline``, ``fit``      how long that takes: by datasheet, or as measured
``scheduling``, ``replica``  the real scheduler, and an engine in simulated time
``fleet``, ``figures``, ``search``  many of them, what they do, how many are needed
``settings``, ``planned``, ``report``  the command's options, what they come to, what it writes
``batches``, ``recording``, ``calibrate_run``, ``calibrate``, ``calibration``  this machine's step times
``cases``, ``replay``, ``validate``  simulated against measured
``errors``                 what a plan can be refused for
"""
