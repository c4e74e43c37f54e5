// SPDX-License-Identifier: GPL-2.0
/*
 * Tells secondary MMUs by the function that the kernel itself uses for it, and does not export.
 *
 * Listeners are told of a beginning and of an end, and count these. So no listener may register in
 * between. A thread that registers one holds the mmap lock for writing, and then takes the i_mmap
 * locks of all files that are mapped. This code holds the i_mmap lock of the file that mounts the
 * tree. That lock has no effect while the mapping is being made or unmade. But the thread that
 * makes or unmakes it holds the mmap lock, and releases it only after the mapping is among the
 * file's, which takes the i_mmap lock, or after the listeners are gone.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/fs.h>
#include <linux/static_call.h>
#include <linux/wait_bit.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_secondary.h"
#include "core/pt_symbol.h"

static int pt_secondary_no_start(struct mmu_notifier_range *range)
{
	return 0;
}

DEFINE_STATIC_CALL(vellum_secondary_start, pt_secondary_no_start);
DEFINE_STATIC_CALL(vellum_secondary_end, pt_secondary_no_end);

static bool pt_secondary_is_found;

void pt_secondary_init(void)
{
	void *start = pt_symbol_find("__mmu_notifier_invalidate_range_start");
	void *end = pt_symbol_find("__mmu_notifier_invalidate_range_end");

	if (!start || !end) {
		pr_warn("no function to tell secondary MMUs: exmaps have no surfaces, punches are slow\n");
		return;
	}
	static_call_update(vellum_secondary_start, start);
	static_call_update(vellum_secondary_end, end);
	pt_secondary_is_found = true;
}

bool pt_secondary_can_be_told(void)
{
	return pt_secondary_is_found;
}

/* The core names an owner for this kind of event alone, and always. */
static char pt_secondary_owner;

bool pt_secondary_is_ours(const struct mmu_notifier_range *range)
{
	return range->event == MMU_NOTIFY_EXCLUSIVE && range->owner == &pt_secondary_owner;
}

bool pt_listener_find(struct pt_mount *mount, struct pt_listener *listener)
{
	lockdep_assert_held(&mount->lock);
	if (!mount->mm || mount->ending)
		return false;
	mount->listeners++;
	*listener = (struct pt_listener){ mount, mount->mm, mount->start };
	return true;
}

static void pt_listener_put(struct pt_mount *mount)
{
	bool is_last;

	spin_lock(&mount->lock);
	is_last = !--mount->listeners && mount->ending;
	spin_unlock(&mount->lock);
	/* The mount may be gone by now. Its address is enough. */
	if (unlikely(is_last))
		wake_up_var(&mount->listeners);
}

bool pt_listener_tell(const struct pt_listener *listener, u64 page, u64 count)
{
	unsigned long start = listener->start + (page << PAGE_SHIFT);
	struct address_space *mapping = listener->mount->mapping;
	struct mmu_notifier_range range = {
		.mm = listener->mm,
		.start = start,
		.end = start + (count << PAGE_SHIFT),
		.flags = MMU_NOTIFIER_RANGE_BLOCKABLE,
		.event = MMU_NOTIFY_EXCLUSIVE,
		.owner = &pt_secondary_owner,
	};

	if (pt_secondary_is_found) {
		i_mmap_lock_read(mapping);
		static_call(vellum_secondary_start)(&range);
		pt_secondary_end(vellum_secondary_end, &range);
		i_mmap_unlock_read(mapping);
	}
	pt_listener_put(listener->mount);
	return pt_secondary_is_found;
}

static bool pt_listeners_exist(struct pt_mount *mount)
{
	bool has;

	/* The last listener may still be about to release the lock. */
	spin_lock(&mount->lock);
	has = mount->listeners;
	spin_unlock(&mount->lock);
	return has;
}

void pt_listeners_wait(struct pt_mount *mount)
{
	wait_var_event(&mount->listeners, !pt_listeners_exist(mount));
}
