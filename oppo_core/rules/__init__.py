"""Rule-based rewards: functions of the prompt's and the response's text, named in a spec as `module:function`."""
