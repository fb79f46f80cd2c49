"""The kinds of run, each a function of a session: training, evaluation, audit."""
