// SPDX-License-Identifier: GPL-2.0
/* No pool: frames come from the kernel, zeroed, and go back to it. For comparison. */

#include <linux/memcontrol.h>
#include <linux/mm.h>

#include "core/frames.h"

bool frame_kernel_fill(struct frame_pool *pool, struct frame_bundle *bundle)
{
	unsigned int want = clamp_t(unsigned int, bundle->want, 1, FRAME_BUNDLE);
	struct page *page;

	while (bundle->count < want) {
		page = NULL;
		if (atomic64_inc_return(&pool->outstanding) <= pool->frames)
			page = alloc_page(FRAME_GFP);
		if (!page) {
			atomic64_dec(&pool->outstanding);
			break;
		}
		bundle->stack[bundle->count++] = page_to_pfn(page);
	}
	return bundle->count;
}

void frame_kernel_drain(struct frame_pool *pool, struct frame_bundle *bundle)
{
	while (bundle->count)
		frame_pool_forget(pool, bundle->stack[--bundle->count]);
}

void frame_pool_forget(struct frame_pool *pool, u64 frame)
{
	put_page(pfn_to_page(frame));
	atomic64_dec(&pool->outstanding);
}
