-- train/preference.lua: computes losses of preference pairs: direct preference optimization (DPO).
--
-- A pair has the log-probabilities of two answers, the preferred one first, as data of records:preference gives them. Rafailov et al.,
-- "Direct preference optimization: your language model is secretly a reward model", NeurIPS 2023 (arXiv:2305.18290), equation 7.
--
-- Dims: B pairs, R rows (2 B), T positions, V vocabulary.

local pl = require "perilune"
local check = require "perilune.check"

local preference = {}

---Sums the log-probabilities of the targets of each row.
---@param logits perilune.Tensor (R, T, V)
---@param targets perilune.Tensor (R, T) ids; -100 does not count
---@return perilune.Tensor # (R) f32
function preference.answer_log_probs(logits, targets)
  local op = "train.answer_log_probs"
  if logits:dim() ~= 3 or targets:dim() ~= 2 or logits:size(0) ~= targets:size(0) or logits:size(1) ~= targets:size(1) then
    pl.error(op, ("the logits have the shape {%s} and the targets {%s}"):format(table.concat(logits.shape, ", "), table.concat(targets.shape, ", ")),
      "give logits (R, T, V) and targets (R, T): x:flatten(0, 1) of a batch of pairs (B, 2, T)")
  end
  local R, T = targets:size()
  return pl.cross_entropy(logits:flatten(0, 1), targets:flatten(), { reduction = "none" }):view(R, T):sum(1):neg()
end

---Computes the loss of direct preference optimization: the mean of -log sigmoid(beta * ((policy_chosen - reference_chosen) - (policy_rejected - reference_rejected))).
---@param policy perilune.Tensor (B, 2) log-probabilities of the answers by the model in training, the preferred one first
---@param reference perilune.Tensor (B, 2) the same by the frozen model that training started from
---@param opts {beta: number?}? beta: how strongly the model is held to the reference
---@return perilune.Tensor loss scalar
---@return table<string, perilune.Tensor> metrics `margin`, the mean difference of the rewards beta * (policy - reference), and `preferred`, the share of pairs in which the preferred answer has the higher reward
function preference.dpo_loss(policy, reference, opts)
  local op = "train.dpo_loss"
  local o = check.options(op, opts, { beta = 0.1 })
  if not (o.beta > 0 and o.beta < math.huge) then pl.error(op, ("beta is %s"):format(o.beta), "give a positive number; 0.1 is usual") end
  local a, b = table.concat(policy.shape, ", "), table.concat(reference.shape, ", ")
  if a ~= b or policy:dim() ~= 2 or policy:size(1) ~= 2 then
    pl.error(op, ("the policy has the shape {%s} and the reference {%s}"):format(a, b), "give (B, 2) for both: answer_log_probs(...):view(-1, 2)")
  end
  local rewards = (policy - reference:detach()) * o.beta
  local margin = rewards:select(1, 0) - rewards:select(1, 1)
  return margin:logsigmoid():mean():neg(), { margin = margin:mean():detach(), preferred = margin:gt(0):to("f32"):mean() }
end

return preference
