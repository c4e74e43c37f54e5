// SPDX-License-Identifier: GPL-2.0
/*
 * Tells secondary MMUs by what the kernel itself uses for it, which is not exported.
 *
 * They are told of a beginning and of an end, and count. So nobody may begin to listen in between,
 * which needs the mmap lock for writing, and then the i_mmap locks of all files that are mapped. It
 * is the latter that is held here, of the file by which the tree is mounted; where it says nothing,
 * because the mapping is just made or just unmade, the mmap lock is held by whoever does that. He
 * lets go of it only after the mapping is among the file's, for which he needs this lock, or after
 * nobody is a listener.
 */
#define pr_fmt(fmt) KBUILD_MODNAME ": " fmt

#include <linux/fs.h>
#include <linux/static_call.h>
#include <linux/wait_bit.h>

#include "core/compat.h"
#include "core/pt_mount.h"
#include "core/pt_secondary.h"
#include "core/pt_symbol.h"

static int no_start(struct mmu_notifier_range *range)
{
	return 0;
}

DEFINE_STATIC_CALL(vellum_secondary_start, no_start);
DEFINE_STATIC_CALL(vellum_secondary_end, secondary_no_end);

static bool is_found;

void pt_secondary_init(void)
{
	void *start = pt_symbol_find("__mmu_notifier_invalidate_range_start");
	void *end = pt_symbol_find("__mmu_notifier_invalidate_range_end");

	if (!start || !end) {
		pr_warn("notifiers are not to be found: no surfaces of exmaps, and slower punches\n");
		return;
	}
	static_call_update(vellum_secondary_start, start);
	static_call_update(vellum_secondary_end, end);
	is_found = true;
}

bool pt_secondary_can_be_told(void)
{
	return is_found;
}

/* The core names an owner for this kind of event alone, and always. */
static char owner;

bool pt_secondary_is_ours(const struct mmu_notifier_range *range)
{
	return range->event == MMU_NOTIFY_EXCLUSIVE && range->owner == &owner;
}

bool pt_listener_find(struct pt_mount *mount, struct pt_listener *listener)
{
	lockdep_assert_held(&mount->lock);
	if (!mount->mm)
		return false;
	mount->listeners++;
	*listener = (struct pt_listener){ mount, mount->mm, mount->start };
	return true;
}

static void let_go(struct pt_mount *mount)
{
	bool is_last;

	spin_lock(&mount->lock);
	/* Who waits for the last one has unmapped the tree before. */
	is_last = !--mount->listeners && !mount->mm;
	spin_unlock(&mount->lock);
	/* It may be gone by now; its address is enough. */
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
		.owner = &owner,
	};

	if (is_found) {
		i_mmap_lock_read(mapping);
		static_call(vellum_secondary_start)(&range);
		secondary_end(vellum_secondary_end, &range);
		i_mmap_unlock_read(mapping);
	}
	let_go(listener->mount);
	return is_found;
}

static bool has_listeners(struct pt_mount *mount)
{
	bool has;

	/* The last one may still be about to release the lock. */
	spin_lock(&mount->lock);
	has = mount->listeners;
	spin_unlock(&mount->lock);
	return has;
}

void pt_listeners_wait(struct pt_mount *mount)
{
	wait_var_event(&mount->listeners, !has_listeners(mount));
}
