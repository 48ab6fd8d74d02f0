/* Why no prompt is shown side by side, and what to do.
     emptyState(reply, { heldOut, filtered }) → { title, text, clear, training, fork }
   `clear`, `training`, `fork`: whether a button is offered that clears the filter, shows training samples, or forks the run. */
const nothing = (title, text, buttons = {}) => ({
  title,
  text,
  clear: false,
  training: false,
  fork: false,
  ...buttons,
});

export function emptyState({ runs, columns }, { heldOut, filtered }) {
  const several = runs.length > 1;
  if (filtered)
    return nothing(
      "No prompt matches",
      "None of the shown responses meets all conditions. Relax or clear the filter.",
      { clear: true },
    );
  if (runs.every((run) => run.samples_per_step === 0))
    return nothing(
      several ? "These runs record no samples" : "This run records no samples",
      "logging.samples_per_step is 0. A fork with 8, for example, records eight responses of each step and evaluation.",
      { fork: true },
    );
  if (heldOut && runs.every((run) => !run.evaluates))
    return nothing(
      several ? "These runs do not evaluate" : "This run does not evaluate",
      "Held-out samples come from evaluations. Set evaluation.prompts to a file of held-out prompts in a fork; " +
        "evaluation.every_steps is the number of steps between two evaluations.",
      { fork: true, training: true },
    );
  const recorded = columns.some((column) => column.last !== null);
  return heldOut ? withoutHeldOut(recorded) : withoutTraining(recorded);
}
function withoutHeldOut(recorded) {
  return recorded
    ? nothing(
        "No held-out prompt has two responses",
        "The runs evaluate different prompts, or not at these steps. Choose other steps or runs.",
      )
    : nothing(
        "No evaluation recorded yet",
        "A run evaluates before its first step, then every evaluation.every_steps steps.",
        { training: true },
      );
}
function withoutTraining(recorded) {
  return recorded
    ? nothing(
        "No training prompt occurs twice",
        "A run records the first logging.samples_per_step responses of each step, and a prompt returns in a later " +
          "epoch. Choose steps that are further apart, or compare held-out prompts.",
      )
    : nothing("No samples yet", "Samples appear after the first step.");
}
