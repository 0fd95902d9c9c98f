#include "engine/request.h"

namespace kdtree {

std::string stop_reason_name(StopReason reason) {
  switch (reason) {
    case StopReason::kEos:
      return "eos";
    case StopReason::kLength:
      return "length";
    case StopReason::kContext:
      return "context";
  }
  return "?";
}

std::string stage_name(Stage stage) {
  switch (stage) {
    case Stage::kDraft:
      return "draft";
    case Stage::kTreeBuild:
      return "tree_build";
    case Stage::kVerify:
      return "verify";
    case Stage::kAccept:
      return "accept";
    case Stage::kCommit:
      return "commit";
  }
  return "?";
}

}  // namespace kdtree
