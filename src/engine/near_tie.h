// Near-ties: choices of the target so close that rounding decides them.
//
// Two correct computations of the same logits (other tree shapes, rank counts, libraries) differ
// where sums run in another order and are rounded to the activation type. An output that differs
// from another run's is explained by rounding only if it first differs at a near-tie.
//
// The bound. Let u be the unit roundoff of activations. A rounding that two computations may do
// differently changes a value by at most u of its size, on average over a mantissa by u / sqrt(3).
// On its way through a layer the residual stream passes kRoundingsALayer such roundings: the
// attention's output and its product, the sum over ranks and the addition, and the same four behind
// the experts. They are independent of each other, so that after L layers and the final norm the
// stream has the relative error
//
//   e = u / sqrt(3) * sqrt(kRoundingsALayer * L + 1)
//
// in a direction that has nothing to do with the head's rows. A logit is a head row times the
// stream, so its error is e times the standard deviation s of the row's logits over the vocabulary,
// and the distance of two logits has sqrt(2) times that. Of V values with deviation s the largest
// is expected at s * sqrt(2 ln V); where it is larger than that the estimate of s is too large,
// which is the safe side. With four standard deviations a choice is a near-tie when
//
//   best - second < 4 * sqrt(2) * e / sqrt(2 ln V) * |best|.
//
// It is a bound on rounding that is not amplified: a router whose scores tie can change more.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "speculative/draft_tree.h"

namespace kdtree {

// The factor of |best| above, for activations of `dtype` (float32 or bf16).
double near_tie_share(DType dtype, std::int64_t num_hidden_layers, std::int64_t vocab_size);

// Whether best - second < share * |best|. Equal logits always are; NaN never.
bool is_near_tie(const ChoiceLogits& choice, double share);

}  // namespace kdtree
