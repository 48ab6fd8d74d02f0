"""Rule-based rewards: plain functions of a prompt's and an answer's text, named in a spec as `module:function`."""
