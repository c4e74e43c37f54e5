// SPDX-License-Identifier: GPL-2.0
/*
 * The pool of the first paper (SIGMOD 2023, 4.4): each lane has a list of free frames under a lock.
 * A lane whose list is empty steals from other lanes, and takes more than it needs: first from the
 * lane that it stole from last, then from the richer of two random lanes, then from one after the
 * other. For comparison.
 */

#include <linux/mm.h>
#include <linux/random.h>

#include "core/frames.h"

/* How many frames a lane steals at a time, if there are so many. */
#define FRAME_LOOT	512

/* Part of a lane's list. */
struct frame_chain {
	u64	first, last, length;
};

static void frame_chain_put(struct frame_lane *lane, struct frame_chain chain)
{
	if (!chain.length)
		return;
	spin_lock(&lane->lock);
	set_page_private(pfn_to_page(chain.last), lane->first);
	lane->first = chain.first;
	WRITE_ONCE(lane->length, lane->length + chain.length);
	spin_unlock(&lane->lock);
}

/* Takes up to so many frames from the front of the list. */
static struct frame_chain frame_chain_get(struct frame_lane *lane, u64 most)
{
	struct frame_chain chain = {};

	if (!READ_ONCE(lane->length))
		return chain;
	spin_lock(&lane->lock);
	chain.first = lane->first;
	while (lane->first && chain.length < most) {
		chain.last = lane->first;
		chain.length++;
		lane->first = page_private(pfn_to_page(lane->first));
	}
	WRITE_ONCE(lane->length, lane->length - chain.length);
	spin_unlock(&lane->lock);
	return chain;
}

static bool frame_steal(struct frame_pool *pool, struct frame_lane *lane, unsigned int from,
			u64 want)
{
	struct frame_lane *victim = &pool->lanes[from % pool->count];
	struct frame_chain loot = {};

	if (victim != lane)
		loot = frame_chain_get(victim, max_t(u64, want, FRAME_LOOT));
	frame_chain_put(lane, loot);
	if (loot.length)
		lane->victim = from % pool->count;
	return READ_ONCE(lane->length) >= want;
}

static void frame_steal_enough(struct frame_pool *pool, struct frame_lane *lane, u64 want)
{
	unsigned int one = get_random_u32() % pool->count;
	unsigned int other = get_random_u32() % pool->count;
	unsigned int i;

	if (frame_steal(pool, lane, lane->victim, want))
		return;
	if (READ_ONCE(pool->lanes[other].length) > READ_ONCE(pool->lanes[one].length))
		one = other;
	if (frame_steal(pool, lane, one, want))
		return;
	for (i = 1; i < pool->count; i++)
		if (frame_steal(pool, lane, lane - pool->lanes + i, want))
			return;
}

bool frame_steal_fill(struct frame_pool *pool, struct frame_lane *lane,
		      struct frame_bundle *bundle)
{
	u64 want = clamp_t(u64, bundle->want, 1, FRAME_BUNDLE);
	struct frame_chain chain;
	u64 frame, next;

	if (READ_ONCE(lane->length) < want)
		frame_steal_enough(pool, lane, want);
	chain = frame_chain_get(lane, want);
	for (frame = chain.first; chain.length; chain.length--, frame = next) {
		next = page_private(pfn_to_page(frame));
		set_page_private(pfn_to_page(frame), 0);
		bundle->stack[bundle->count++] = frame;
	}
	return bundle->count;
}

void frame_steal_drain(struct frame_lane *lane, struct frame_bundle *bundle)
{
	struct frame_chain chain = { .length = bundle->count };
	unsigned int i;

	for (i = 0; i < bundle->count; i++) {
		u64 frame = bundle->stack[i];

		if (!chain.last)
			chain.last = frame;
		set_page_private(pfn_to_page(frame), chain.first);
		chain.first = frame;
	}
	bundle->count = 0;
	frame_chain_put(lane, chain);
}

void frame_steal_add(struct frame_lane *lane, struct page *page)
{
	u64 frame = page_to_pfn(page);

	frame_chain_put(lane, (struct frame_chain){ frame, frame, 1 });
}
