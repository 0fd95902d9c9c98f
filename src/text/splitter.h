// Cuts a text into the pieces within which byte pairs are merged: the pre-tokenizers of a
// tokenizer.json (Hugging Face's `tokenizers`), or the one pattern of a tiktoken vocabulary.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "text/regex.h"

namespace kdtree {

// What becomes of a match, named as in tokenizer.json. The text between matches is a piece.
enum class SplitBehavior {
  kIsolated,            // a piece of its own
  kRemoved,             // dropped
  kMergedWithPrevious,  // joins the piece before it, unless that is a match too
  kMergedWithNext,      // joins the piece behind it, unless that is a match too
  kContiguous,          // matches that touch are one piece
};

struct SplitStep {
  Regex pattern;
  SplitBehavior behavior = SplitBehavior::kIsolated;
  bool invert = false;  // what lies between the matches counts as the matches
};

class Splitter {
 public:
  void add(SplitStep step) { steps_.push_back(std::move(step)); }

  // Replaces `pieces` by the pieces of `text` in their order, none of them empty; offsets count
  // bytes of `text`, which must be valid UTF-8. Each step cuts the pieces of the one before it and
  // sees nothing around them. InputError if a pattern gives up.
  void split(std::string_view text, std::vector<TextRange>& pieces) const;

 private:
  std::vector<SplitStep> steps_;
};

}  // namespace kdtree
