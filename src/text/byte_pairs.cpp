#include "text/byte_pairs.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <utility>

#include "core/check.h"

namespace kdtree {

namespace {

constexpr std::size_t kMaxCachedWords = std::size_t{1} << 16;
constexpr std::size_t kMaxCachedBytes = 64;  // a slot counts them in a byte

// A power of two of which `count` is at most half.
std::size_t num_slots(std::size_t count) {
  std::size_t slots = 16;
  while (slots < 2 * count) {
    slots *= 2;
  }
  return slots;
}

std::uint64_t pair_key(std::int32_t left, std::int32_t right) {
  return std::uint64_t{static_cast<std::uint32_t>(left)} << 32U | static_cast<std::uint32_t>(right);
}

// Spreads neighbouring ids over the table: the odd number is 2^64 over the golden ratio.
std::uint64_t scatter(std::uint64_t key) {
  key *= 0x9e3779b97f4a7c15U;
  return key ^ (key >> 29U);
}

using Node = BytePairScratch::Node;
using Candidate = BytePairScratch::Candidate;

// For a heap with the lowest rank on top, of equal ranks the leftmost.
bool comes_later(const Candidate& a, const Candidate& b) {
  return a.rank != b.rank ? a.rank > b.rank : a.node > b.node;
}

// `find(node, next)` is the merge of two neighbours.
template <class Find>
void push_candidate(BytePairScratch& scratch, std::int32_t index, const Find& find) {
  const Node& node = scratch.nodes[static_cast<std::size_t>(index)];
  if (node.next < 0) {
    return;
  }
  const Node& next = scratch.nodes[static_cast<std::size_t>(node.next)];
  const Merge merge = find(node, next);
  if (merge.id >= 0) {
    scratch.heap.push_back({merge.rank, index, node.id, next.id, merge.id});
  }
}

template <class Find>
void merge_all(BytePairScratch& scratch, const Find& find) {
  auto& [nodes, heap] = scratch;
  heap.clear();
  for (std::size_t i = 0; i + 1 < nodes.size(); ++i) {
    push_candidate(scratch, static_cast<std::int32_t>(i), find);
  }
  std::make_heap(heap.begin(), heap.end(), comes_later);
  const auto push = [&](std::int32_t index) {
    const std::size_t before = heap.size();
    push_candidate(scratch, index, find);
    if (heap.size() > before) {
      std::push_heap(heap.begin(), heap.end(), comes_later);
    }
  };
  while (!heap.empty()) {
    std::pop_heap(heap.begin(), heap.end(), comes_later);
    const Candidate best = heap.back();
    heap.pop_back();
    Node& left = nodes[static_cast<std::size_t>(best.node)];
    if (left.id != best.left || left.next < 0 ||
        nodes[static_cast<std::size_t>(left.next)].id != best.right) {
      continue;
    }
    Node& right = nodes[static_cast<std::size_t>(left.next)];
    left.id = best.merged;
    left.next = right.next;
    right.id = -1;
    if (left.next >= 0) {
      nodes[static_cast<std::size_t>(left.next)].previous = best.node;
    }
    push(best.node);
    if (left.previous >= 0) {
      push(left.previous);
    }
  }
}

}  // namespace

TokenMap::TokenMap(std::vector<std::string_view> tokens, std::int64_t* duplicate)
    : tokens_(std::move(tokens)), slots_(num_slots(tokens_.size()), -1) {
  if (duplicate != nullptr) {
    *duplicate = -1;
  }
  const std::size_t mask = slots_.size() - 1;
  for (std::size_t id = 0; id < tokens_.size(); ++id) {
    if (tokens_[id].empty()) {
      continue;
    }
    std::size_t slot = std::hash<std::string_view>()(tokens_[id]) & mask;
    while (slots_[slot] >= 0 && tokens_[static_cast<std::size_t>(slots_[slot])] != tokens_[id]) {
      slot = (slot + 1) & mask;
    }
    if (slots_[slot] < 0) {
      slots_[slot] = static_cast<std::int32_t>(id);
    } else if (duplicate != nullptr) {
      *duplicate = static_cast<std::int64_t>(id);
    }
  }
}

std::int32_t TokenMap::find(std::string_view bytes) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = std::hash<std::string_view>()(bytes) & mask;
  while (slots_[slot] >= 0 && tokens_[static_cast<std::size_t>(slots_[slot])] != bytes) {
    slot = (slot + 1) & mask;
  }
  return slots_[slot];
}

void MergeTable::reset(std::size_t count) {
  slots_.assign(num_slots(count), Slot{});
}

std::size_t MergeTable::place(std::uint64_t key) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t slot = scatter(key) & mask;
  while (slots_[slot].key != key && slots_[slot].key != Slot{}.key) {
    slot = (slot + 1) & mask;
  }
  return slot;
}

bool MergeTable::add(std::int32_t left, std::int32_t right, Merge merge) {
  Slot& slot = slots_[place(pair_key(left, right))];
  if (slot.key != Slot{}.key) {
    return false;
  }
  slot = {pair_key(left, right), merge};
  return true;
}

Merge MergeTable::find(std::int32_t left, std::int32_t right) const {
  return slots_[place(pair_key(left, right))].merge;
}

void BytePairs::encode(std::string_view piece, BytePairScratch& scratch,
                       std::vector<std::int32_t>& ids) const {
  check(piece.size() <= INT32_MAX, "a piece of {} bytes", piece.size());
  if (piece.size() == 1) {
    ids.push_back(byte_ids[static_cast<unsigned char>(piece[0])]);
    return;
  }
  if (whole_pieces) {
    const std::int32_t id = tokens.find(piece);
    if (id >= 0) {
      ids.push_back(id);
      return;
    }
  }
  const auto count = static_cast<std::int32_t>(piece.size());
  scratch.nodes.resize(piece.size());
  for (std::int32_t i = 0; i < count; ++i) {
    const auto at = static_cast<std::size_t>(i);
    scratch.nodes[at] = {byte_ids[static_cast<unsigned char>(piece[at])], i - 1,
                         i + 1 < count ? i + 1 : -1, static_cast<std::uint32_t>(i)};
  }
  if (by_merges) {
    merge_all(scratch,
              [&](const Node& left, const Node& right) { return merges.find(left.id, right.id); });
  } else {
    merge_all(scratch, [&](const Node& left, const Node& right) {
      const std::size_t end =
          right.next < 0 ? piece.size() : scratch.nodes[static_cast<std::size_t>(right.next)].begin;
      const std::int32_t id = tokens.find(piece.substr(left.begin, end - left.begin));
      return Merge{static_cast<std::uint32_t>(id), id};
    });
  }
  for (std::int32_t i = 0; i >= 0 && count > 0;
       i = scratch.nodes[static_cast<std::size_t>(i)].next) {
    ids.push_back(scratch.nodes[static_cast<std::size_t>(i)].id);
  }
}

std::size_t WordCache::place(std::string_view word, std::uint32_t hash) const {
  const std::size_t mask = slots_.size() - 1;
  std::size_t index = hash & mask;
  while (slots_[index].word_size > 0) {
    const Slot& slot = slots_[index];
    if (slot.hash == hash && slot.word_size == word.size() &&
        std::memcmp(words_.data() + slot.word_begin, word.data(), word.size()) == 0) {
      break;
    }
    index = (index + 1) & mask;
  }
  return index;
}

void WordCache::grow() {
  std::vector<Slot> old(num_slots(2 * num_words_));
  old.swap(slots_);
  const std::size_t mask = slots_.size() - 1;
  for (const Slot& slot : old) {
    if (slot.word_size == 0) {
      continue;
    }
    std::size_t index = slot.hash & mask;
    while (slots_[index].word_size > 0) {
      index = (index + 1) & mask;
    }
    slots_[index] = slot;
  }
}

void WordCache::add(std::string_view word, std::uint32_t hash, std::span<const std::int32_t> ids) {
  if (num_words_ >= kMaxCachedWords) {
    *this = WordCache();
  }
  if (2 * (num_words_ + 1) > slots_.size()) {
    grow();
  }
  slots_[place(word, hash)] = {.hash = hash,
                               .word_begin = static_cast<std::uint32_t>(words_.size()),
                               .ids_begin = static_cast<std::uint32_t>(ids_.size()),
                               .word_size = static_cast<std::uint8_t>(word.size()),
                               .num_ids = static_cast<std::uint8_t>(ids.size())};
  ++num_words_;
  words_ += word;
  ids_.insert(ids_.end(), ids.begin(), ids.end());
}

void WordCache::encode(const BytePairs& pairs, std::string_view piece, BytePairScratch& scratch,
                       std::vector<std::int32_t>& ids) {
  if (piece.size() > kMaxCachedBytes || piece.empty()) {
    pairs.encode(piece, scratch, ids);
    return;
  }
  const auto hash = static_cast<std::uint32_t>(std::hash<std::string_view>()(piece));
  if (!slots_.empty()) {
    const Slot& slot = slots_[place(piece, hash)];
    if (slot.word_size > 0) {
      for (std::uint32_t i = 0; i < slot.num_ids; ++i) {
        ids.push_back(ids_[slot.ids_begin + i]);
      }
      return;
    }
  }
  const std::size_t first = ids.size();
  pairs.encode(piece, scratch, ids);
  add(piece, hash, std::span(ids).subspan(first));
}

}  // namespace kdtree
