// Chat templates against published renderings (golden) and renderings of the published DeepSeek-V3
// template by jinja2 (tests/data/chat).
#include <gtest/gtest.h>

#include <algorithm>
#include <initializer_list>

#include "tests/unit/text_test_support.h"
#include "text/chat_template.h"

namespace kdtree {
namespace {

using Json = nlohmann::json;

std::string render(ChatTemplate chat_template, const Json& chat, bool thinking = true) {
  std::string text;
  for (const ChatSegment& segment :
       render_chat(chat_template, parse_chat(chat, "c.json"), thinking)) {
    text += segment.text;
  }
  return text;
}

TEST(TextChat, DeepseekEqualsThePublishedTemplate) {
  const std::vector<Json> cases = read_json_lines(tokenizer_path("../chat/deepseek_v3.jsonl"));
  EXPECT_GE(cases.size(), 30U);
  for (const Json& line : cases) {
    const auto expected = line["text"].get<std::string>();
    EXPECT_EQ(render(ChatTemplate::kDeepseekV3, line), expected) << line;
    const bool answers = expected.ends_with("<｜Assistant｜>");
    EXPECT_EQ(render(ChatTemplate::kDeepseekR1, line), expected + (answers ? "<think>\n" : ""));
  }
}

TEST(TextChat, Kimi) {
  const Json hello = {{{"role", "user"}, {"content", "Hi"}}};
  const std::string user = "<|im_user|>user<|im_middle|>Hi<|im_end|>";
  const std::string header = "<|im_assistant|>assistant<|im_middle|>";
  EXPECT_EQ(render(ChatTemplate::kKimiK26, hello), user + header + "<think>");
  EXPECT_EQ(render(ChatTemplate::kKimiK26, hello, false), user + header + "<think></think>");
  EXPECT_EQ(render(ChatTemplate::kKimiK2, hello),
            "<|im_system|>system<|im_middle|>You are Kimi, an AI assistant created by Moonshot "
            "AI.<|im_end|>" +
                user + header);
  Json chat = hello;
  chat.push_back({{"role", "assistant"}, {"content", "A"}, {"reasoning_content", "old"}});
  chat.push_back({{"role", "user"}, {"content", "Hi"}});
  const Json call = {{"id", "f:0"}, {"function", {{"name", "f"}, {"arguments", "{}"}}}};
  chat.push_back({{"role", "assistant"}, {"reasoning_content", "new"}, {"tool_calls", {call}}});
  chat.push_back({{"role", "tool"}, {"tool_call_id", "f:0"}, {"content", "1"}});
  EXPECT_EQ(render(ChatTemplate::kKimiK26, chat),
            user + header + "<think></think>A<|im_end|>" + user + header +
                "<think>new</think><|tool_calls_section_begin|><|tool_call_begin|>f:0"
                "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"
                "<|im_end|><|im_system|>tool<|im_middle|>## Return of f:0\n1<|im_end|>" +
                header + "<think>");
}

TEST(TextChat, ControlTokensOfAUserStayText) {
  const Json chat = {{{"role", "user"}, {"content", "<|im_end|>"}}};
  const Tokenizer tokenizer = load_tokenizer(tokenizer_path("kimi_like"));
  const std::int32_t end = *tokenizer.find_added("<|im_end|>");
  const auto count = [&](const Json& messages) {
    const Ids ids = encode_chat(
        tokenizer, render_chat(ChatTemplate::kKimiK26, parse_chat(messages, "c"), true));
    return std::count(ids.begin(), ids.end(), end);
  };
  EXPECT_EQ(count(chat), 1);
}

TEST(TextChat, WrongConversationsAreNamed) {
  const auto refused = [](const char* text, std::initializer_list<std::string> words) {
    expect_input_error([&] { parse_chat(Json::parse(text), "c.json"); }, words);
  };
  refused("3", {"c.json", "object"});
  refused("{}", {"messages", "missing"});
  refused("[]", {"c.json", "no messages"});
  refused(R"([{"role": "judge", "content": "x"}])", {"[0].role", "judge", "user"});
  refused(R"([{"role": "user"}])", {"[0].content", "missing"});
  refused(R"([{"role": "user", "content": 3}])", {"[0].content", "3", "string"});
  refused(R"({"messages": [], "tools": [1]})", {"tools", "supported"});
}

}  // namespace
}  // namespace kdtree
