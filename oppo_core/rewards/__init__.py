"""Rewards: streamed reward models, rules, services, and models that read text; one or a weighted sum.

    spec ──build.RewardBuilder──▶ Rewards ─┬─ streamed parts: networks that read the actor's tokens in chunks
                                           └─ finished parts: rule.py, service.py, text_model.py, vllm_model.py

`composite.RewardReader` feeds both and adds the scores. Scores are raw here; penalties, scaling and clipping come later
(ppo/experience.py).
"""
