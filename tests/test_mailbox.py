# SPDX-License-Identifier: Apache-2.0
"""The box between threads: in order, and nothing lost or seen twice."""

import threading

from ucm.mailbox import Mailbox


class TestMailbox:
    def test_messages_come_out_in_the_order_they_were_put(self):
        """One producer's messages keep their order, over several drains too."""
        box = Mailbox()
        for number in range(3):
            box.put(number)
        assert 3 == len(box)
        assert [0, 1, 2] == box.drain()
        box.put(3)
        assert [3] == box.drain()

    def test_empty_box_drains_to_nothing(self):
        """Draining never waits for a message."""
        box = Mailbox()
        assert [] == box.drain()
        assert 0 == len(box)

    def test_wait_ends_with_a_message_that_was_put(self):
        """A reader that waits for news is woken by it, and not by old news."""
        box = Mailbox()
        assert not box.wait(0)
        thread = threading.Thread(target=box.put, args=(1,))
        thread.start()
        assert box.wait(60.0)
        thread.join(60.0)
        assert [1] == box.drain()
        assert not box.wait(0)

    def test_two_producers_beside_a_drain_lose_nothing(self):
        """S2-11: two threads put while a third drains; each message comes once, and
        each thread's own in order."""
        box, taken = Mailbox(), []
        start = threading.Barrier(3)
        count = 5000

        def produce(name):
            start.wait(60.0)
            for number in range(count):
                box.put((name, number))

        threads = [threading.Thread(target=produce, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        start.wait(60.0)
        while any(thread.is_alive() for thread in threads):
            taken.extend(box.drain())
        for thread in threads:
            thread.join(60.0)
        taken.extend(box.drain())
        for name in "ab":
            assert list(range(count)) == [n for who, n in taken if who == name]
        assert 2 * count == len(taken)
