# SPDX-License-Identifier: Apache-2.0
"""The paper's theory on real models: do the assumptions of its appendix D hold, and what do they give?

Paper: Zhang et al., "H2O: Heavy-Hitter Oracle", NeurIPS 2023, arXiv 2306.14048v3; D.n is its numbering. A
step i is a token; S_i are the k tokens kept after it, per layer and KV head; f_i is what the step maximises;
opt_i the best that any k of the first i tokens reach (D.27). Theorem D.32 promises

    f(S_i) >= (1 - 1/e) (1 - alpha) opt_i - beta,    alpha in (0, 1), beta > 0

if f_i(S) >= (1 - theta) f_{i-1}(S) (D.25), opt_i >= (1 - gamma) opt_{i-1} (D.28), f_i is monotone (D.23) and
submodular (D.4), and the scores in the cut cache lie within eps of the true ones (D.30), where
theta = gamma = alpha / (10 n) and eps = beta / (10 n) of n tokens. No engine. From below to above:

``settings``    the command line
``watched``     a text's attention, and what H2O keeps of it, token by token
``functions``   what a step maximises: f_i and its h
``greedy``      the paper's greedy steps, and the optimum by brute force
``ranks``       how alike two rankings are
``steps``       theta, gamma, and the alpha that they ask for
``local``       eps: scores in the cut cache against those of full attention
``output``      a set function that matters: how near attention's output comes
``returns``     how often it fails diminishing returns and monotony
``optimum``     what greedy steps reach of its optimum
``future``      scores so far against the attention that comes
``figures``     rows to numbers
``report``      numbers to tables
``plot``        and a picture
"""
