// Fixed-size frames over TCP, for comm/peer_watch. No call waits longer than its limit, and none
// raises SIGPIPE.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace kdtree {

// Owned file descriptor; -1 for none.
class Descriptor {
 public:
  Descriptor() = default;
  explicit Descriptor(int number) : number_(number) {}
  Descriptor(Descriptor&& other) noexcept;
  Descriptor& operator=(Descriptor&& other) noexcept;
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor();

  int number() const { return number_; }
  bool open() const { return number_ >= 0; }

 private:
  int number_ = -1;
};

// What travels: a kind, a rank, a secret that keeps strangers out, a text (cut to fit).
struct Frame {
  enum Kind : std::uint32_t { kHello, kWelcome, kAlive, kGoodbye, kFailed };

  std::uint32_t kind = kAlive;
  std::int32_t rank = 0;
  std::uint64_t token = 0;
  std::array<char, 240> text{};

  void set_text(const std::string& value);
};

// One end of a connection.
class Channel {
 public:
  enum class Received { kFrame, kNothing, kClosed };

  Channel() = default;
  explicit Channel(Descriptor socket) : socket_(std::move(socket)) {}

  int number() const { return socket_.number(); }
  bool open() const { return socket_.open(); }
  void close() { socket_ = Descriptor(); }
  // Gives up (false) where the other end is gone or, once begun, takes nothing for a second; a
  // frame that does not fit in now at all is left out (true).
  bool send(const Frame& frame);
  // The next whole frame, without waiting.
  Received receive(Frame& frame);
  // The next whole frame; false if none comes in time.
  bool wait_for(Frame& frame, std::chrono::milliseconds limit);

 private:
  Descriptor socket_;
  std::array<std::byte, sizeof(Frame)> buffer_{};
  std::size_t filled_ = 0;
};

// Where a listener can be reached: IPv4 addresses in network order, without the loopback.
struct Listener {
  Descriptor socket;
  std::uint16_t port = 0;
  std::vector<std::uint32_t> addresses;
};

// Listens on a free port of all interfaces; empty where the system forbids it.
std::optional<Listener> listen_anywhere();
// A waiting connection, or a closed channel.
Channel accept_channel(const Listener& listener);
// Connects within the limit, or returns a closed channel.
Channel connect_channel(std::uint32_t address, std::uint16_t port, std::chrono::milliseconds limit);

}  // namespace kdtree
