// SPDX-License-Identifier: GPL-2.0
/*
 * Translations of pages go, after their entries have changed and before a frame is anybody else's:
 * what processors remember, and what secondary MMUs have, such as a virtual machine whose memory the
 * surface is.
 *
 * It is the process that gave the command whose processors are asked. If that has unmapped the
 * surface meanwhile, and another one has mapped it, then that one's as well.
 */

#include <linux/mm.h>

#include "core/pt_flush.h"
#include "exmap/exmap.h"

void exmap_flush(struct exmap *exmap, struct mm_struct *mm, u64 first, u64 last)
{
	unsigned long start = READ_ONCE(exmap->mount.start);

	if (last - first >= EXMAP_FLUSH_PAGES) {
		exmap_flush_all(exmap, mm);
		return;
	}
	pt_flush_range(mm, start + (first << PAGE_SHIFT), start + ((last + 1) << PAGE_SHIFT));
	pt_mount_tell(&exmap->mount, mm, first, last - first + 1);
}

void exmap_flush_extent(struct exmap *exmap, struct mm_struct *mm, u64 page)
{
	pt_flush_huge(mm, READ_ONCE(exmap->mount.start) + (page << PAGE_SHIFT));
	pt_mount_tell(&exmap->mount, mm, page, PT_ENTRIES);
}

void exmap_flush_all(struct exmap *exmap, struct mm_struct *mm)
{
	pt_flush_all(mm);
	pt_mount_tell(&exmap->mount, mm, 0, exmap->tree.pages);
}

/* Pages that got frames may be remembered as those that showed zeros. */
void exmap_flush_zeros(struct exmap *exmap, struct exmap_interface *interface,
		       struct mm_struct *mm)
{
	exmap_flush_all(exmap, mm);
	interface->flushes++;
}
