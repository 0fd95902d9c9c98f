// Near-ties: choices of the target so close that rounding decides them.
//
// Two correct computations of the same logits (other tree shapes, rank counts, libraries) differ
// where sums run in another order and are rounded to the activation type. An output that differs
// from another run's is explained by rounding only if it first differs at a near-tie.
//
// The bound. Let u be the unit roundoff of activations. A rounding that two computations may do
// differently changes a value by at most u of its size, on average over a mantissa by u / sqrt(3).
// On its way through a layer the residual stream passes kRoundingsALayer such roundings: the
// attention's output and its product, the sum over ranks (whose terms follow the number of ranks
// and the placement of experts) and the addition, and the same four behind the feed-forward. They
// are independent of each other, so that after L layers and the final norm the stream has the
// relative error
//
//   r = u / sqrt(3) * sqrt(kRoundingsALayer * L + 1).
//
// A router amplifies it where the k-th and the next of its E scores are so close that they change
// places. Of E normal values with deviation 1 those two are g = 1 / (E * phi(z)) apart on average,
// z being the upper k / E quantile and phi the normal density, and exponentially distributed. The
// error moves their distance by sqrt(2) r times a normal value, so that they change places with
// the probability p = min(1, 2 r / (sqrt(pi) g)). One expert of k with about equal weights is then
// another one: a change of sqrt(2) / k of the layer's output, which is one of the 2 L parts of
// about equal size that the stream is made of. With M mixture-of-experts layers the error of that
// is
//
//   f = sqrt(M * p * 2 / k^2 / (2 L)),
//
// left out where M p is below the probability of four standard deviations. Both together, e =
// sqrt(r^2 + f^2), have a direction that has nothing to do with the head's rows. A logit is a head
// row times the stream, so its error is e times the standard deviation s of the row's logits over
// the vocabulary, and the distance of two logits has sqrt(2) times that. Of V values with deviation
// s the largest is expected at s * sqrt(2 ln V); where it is larger than that the estimate of s is
// too large, which is the safe side. With four standard deviations a choice is a near-tie when
//
//   best - second < 4 * sqrt(2) * e / sqrt(2 ln V) * |best|.
#pragma once

#include <cstdint>

#include "config/model_config.h"
#include "core/dtype.h"
#include "speculative/draft_tree.h"

namespace kdtree {

// The factor of |best| above, for activations of `dtype` (float32 or bf16).
double near_tie_share(DType dtype, const ModelConfig& config);

// (best - second) / (share * |best|): below 1 for a near-tie, infinite for every other choice. 0
// for equal logits whatever the share; infinite where a logit is NaN.
double near_tie_margin(const ChoiceLogits& choice, double share);

}  // namespace kdtree
