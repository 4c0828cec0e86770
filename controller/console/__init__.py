"""The console: a page on a frontend's admin port that shows the fleet as it is, and what happens in it.

    memory.py ──▶ picture.py ──▶ sections.py ──▶ feed.py ──▶ endpoints.py ──▶ console.js
    what is kept    the fold       what has        once for     over HTTP       draws it
    while nobody    and the last   changed         all who
    looks           events as rows                 look

`history.py` has a command read what the journal must tell, in a process beside the frontend; `guard.py` says who may ask,
`actions.py` what may be done. Composed in `controller/processes/operating`.
"""
