#include "text/splitter.h"

#include <algorithm>

namespace kdtree {

namespace {

struct Part {
  TextRange range;
  bool is_match = false;
};

// The matches and what lies between them, in order: together all of [0, size).
void list_parts(const std::vector<TextRange>& matches, std::size_t size, bool invert,
                std::vector<Part>& parts) {
  parts.clear();
  std::size_t end = 0;
  for (const TextRange& match : matches) {
    if (end != match.begin) {
      parts.push_back({{end, match.begin}, invert});
    }
    parts.push_back({match, !invert});
    end = match.end;
  }
  if (end != size) {
    parts.push_back({{end, size}, invert});
  }
}

// Joins parts in place so that each of the rest is one piece.
void join_with_previous(std::vector<Part>& parts) {
  std::size_t count = 0;
  bool after_match = false;
  for (const Part& part : parts) {
    if (part.is_match && !after_match && count > 0) {
      parts[count - 1].range.end = part.range.end;
    } else {
      parts[count++] = part;
    }
    after_match = part.is_match;
  }
  parts.resize(count);
}

void join_with_next(std::vector<Part>& parts) {
  std::size_t first = parts.size();
  bool before_match = false;
  for (std::size_t i = parts.size(); i-- > 0;) {
    const Part part = parts[i];
    if (part.is_match && !before_match && first < parts.size()) {
      parts[first].range.begin = part.range.begin;
    } else {
      parts[--first] = part;
    }
    before_match = part.is_match;
  }
  parts.erase(parts.begin(), parts.begin() + static_cast<std::ptrdiff_t>(first));
}

void join_alike(std::vector<Part>& parts) {
  std::size_t count = 0;
  for (const Part& part : parts) {
    if (count > 0 && parts[count - 1].is_match == part.is_match) {
      parts[count - 1].range.end = part.range.end;
    } else {
      parts[count++] = part;
    }
  }
  parts.resize(count);
}

void apply(SplitBehavior behavior, std::vector<Part>& parts) {
  switch (behavior) {
    case SplitBehavior::kIsolated:
      return;
    case SplitBehavior::kRemoved:
      parts.erase(std::remove_if(parts.begin(), parts.end(),
                                 [](const Part& part) { return part.is_match; }),
                  parts.end());
      return;
    case SplitBehavior::kMergedWithPrevious:
      return join_with_previous(parts);
    case SplitBehavior::kMergedWithNext:
      return join_with_next(parts);
    case SplitBehavior::kContiguous:
      return join_alike(parts);
  }
}

}  // namespace

void Splitter::split(std::string_view text, std::vector<TextRange>& pieces) const {
  pieces.clear();
  if (!text.empty()) {
    pieces.push_back({0, text.size()});
  }
  std::vector<TextRange> uncut;
  std::vector<TextRange> matches;
  std::vector<Part> parts;
  for (const SplitStep& step : steps_) {
    uncut.swap(pieces);
    pieces.clear();
    for (const TextRange& piece : uncut) {
      const std::string_view whole = text.substr(piece.begin, piece.end - piece.begin);
      matches.clear();
      step.pattern.find_all(whole, matches);
      list_parts(matches, whole.size(), step.invert, parts);
      apply(step.behavior, parts);
      for (const Part& part : parts) {
        if (part.range.begin != part.range.end) {
          pieces.push_back({piece.begin + part.range.begin, piece.begin + part.range.end});
        }
      }
    }
  }
}

}  // namespace kdtree
