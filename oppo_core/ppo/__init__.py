"""PPO: losses, advantages, experience, and the actor's and critic's trainers."""
