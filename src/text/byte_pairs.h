// Byte pair encoding of one piece of text: its bytes are tokens at first, then the neighbours of
// lowest rank are merged, the leftmost of equals first, until no neighbours can be.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace kdtree {

// From token bytes to ids: open addressing, a quarter to half full.
class TokenMap {
 public:
  TokenMap() = default;
  // Ids are the positions; empty tokens are left out. The bytes must outlive the map. Of equal
  // tokens the first stays; `duplicate`, unless null, gets the position of another, or -1.
  explicit TokenMap(std::vector<std::string_view> tokens, std::int64_t* duplicate = nullptr);
  // The id, -1 if no token has these bytes.
  std::int32_t find(std::string_view bytes) const;

 private:
  std::vector<std::string_view> tokens_;
  std::vector<std::int32_t> slots_;  // ids, -1 where free; the number is a power of two
};

struct Merge {
  std::uint32_t rank = 0;
  std::int32_t id = -1;  // of the merged token; -1 if there is no such merge
};

// From two neighbours' ids to their merge: open addressing as well.
class MergeTable {
 public:
  // Makes room for `count` merges, and forgets those that it has.
  void reset(std::size_t count);
  // False, and nothing else, if this pair is in it already.
  bool add(std::int32_t left, std::int32_t right, Merge merge);
  Merge find(std::int32_t left, std::int32_t right) const;

 private:
  struct Slot {
    std::uint64_t key = ~std::uint64_t{0};  // both ids; all ones where free
    Merge merge;
  };
  std::size_t place(std::uint64_t key) const;  // where the key is or would be
  std::vector<Slot> slots_;
};

// What the merging of one piece needs, kept from piece to piece for its memory.
struct BytePairScratch {
  struct Node {
    std::int32_t id = 0;        // -1 once it is merged into the node before it
    std::int32_t previous = 0;  // indices of the neighbours, -1 for none
    std::int32_t next = 0;
    std::uint32_t begin = 0;  // offset in the piece
  };
  struct Candidate {
    std::uint32_t rank = 0;
    std::int32_t node = 0;  // the left one
    std::int32_t left = 0;  // ids of both when it was found: if they changed, it is void
    std::int32_t right = 0;
    std::int32_t merged = 0;
  };
  std::vector<Node> nodes;
  std::vector<Candidate> heap;
};

// The ranks of one vocabulary. Either
//   tiktoken: a token's rank is its id, and two neighbours merge if their bytes are a token, or
//   tokenizer.json: neighbours merge if the list "merges" has them, ranked by their place in it.
struct BytePairs {
  std::vector<std::int32_t> byte_ids;  // [256], the token of each byte
  bool by_merges = false;
  MergeTable merges;  // if by_merges
  TokenMap tokens;    // unless by_merges, or if whole_pieces
  // A piece that is a token is that token, whatever its merges lead to: tiktoken, and
  // "ignore_merges" of tokenizer.json.
  bool whole_pieces = false;

  // Appends the ids of `piece`, fewer than 2^31 bytes. O(n log n) for n bytes.
  void encode(std::string_view piece, BytePairScratch& scratch,
              std::vector<std::int32_t>& ids) const;
};

// Ids of pieces met before, since words repeat. Long pieces are not kept, and when it is full it
// begins anew.
class WordCache {
 public:
  // Appends the ids of `piece`, from the cache or from `pairs`, always the same BytePairs.
  void encode(const BytePairs& pairs, std::string_view piece, BytePairScratch& scratch,
              std::vector<std::int32_t>& ids);

 private:
  // A word and its ids; both lie one after the other in words_ and ids_. Words and thus counts are
  // at most kMaxCachedBytes, free slots have size 0.
  struct Slot {
    std::uint32_t hash = 0;
    std::uint32_t word_begin = 0;
    std::uint32_t ids_begin = 0;
    std::uint8_t word_size = 0;
    std::uint8_t num_ids = 0;
  };
  std::size_t place(std::string_view word, std::uint32_t hash) const;  // where it is or would be
  void add(std::string_view word, std::uint32_t hash, std::span<const std::int32_t> ids);
  void grow();

  std::vector<Slot> slots_;  // open addressing, at most half full; the number is a power of two
  std::size_t num_words_ = 0;
  std::string words_;
  std::vector<std::int32_t> ids_;
};

}  // namespace kdtree
