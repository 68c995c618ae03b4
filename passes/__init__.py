"""Graph rewrites and their analyses, one a file, in the order a prefill graph meets them.

    functionalize   no writes in place: every later pass may reason about values
    locate          layers, split state, state writes (changes nothing)
    cuts            what is predicted of each late layer (changes nothing)
    route           the method: predicted inputs on prefix rows   -- or accumulate, to calibrate
    select_rows     positions of prefix rows that stay exact, when asked; part of route
    correct         filled keys and values at exact lengths, or spliced, when asked; part of route
    columns         which columns of a product later values are made of (changes nothing)
    unfuse          fused projections apart, where their columns are read on different rows
    demand          which rows of each value are read (changes nothing)
    eliminate       compute just those
    lower           short convolutions in a form that Inductor makes fast code of
    verify          after each of them, when asked

Routing comes before elimination because it *defines* what is computed, and elimination must not change it. Nothing
after routing knows of maps, layers or prompts.
"""
