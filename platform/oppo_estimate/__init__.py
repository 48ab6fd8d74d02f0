"""What a run would need, estimated without torch: memory per device, and the costs and schedules of the simulator.

The engine's preflight check, the command line and the platform share it. It is fed by shapes: config.json, safetensors headers
and the spec.
"""
