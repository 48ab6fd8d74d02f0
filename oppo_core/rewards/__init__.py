"""What scores an answer: streamed reward models, rules, services, and models that read text; one or a weighted sum.

    spec ──build.build_rewards──▶ Rewards ─┬─ streamed parts: networks that read the actor's tokens while they come
                                           └─ finished parts: a `FinishedReward` each (rule.py, service.py, text_model.py)

`parts.RewardReader` feeds both and adds up. Scores are raw here; penalties, scaling and clipping come later (ppo/experience.py).
"""
