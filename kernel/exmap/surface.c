// SPDX-License-Identifier: GPL-2.0
/* Mappings of an exmap: its surface, and the vectors of its interfaces. */

#include <linux/mm.h>
#include <linux/mman.h>

#include "core/compat.h"
#include "core/pt_secondary.h"
#include "exmap/exmap.h"
#include "exmap/transfer.h"

/* Pages of the longest surface: 16 TiB. Its tables of level 2 take a 262,144th of it. */
#define EXMAP_MAX_SURFACE	BIT_ULL(32)

static vm_fault_t exmap_surface_fault(struct vm_fault *vmf)
{
	struct pt_mount *mount = vmf->vma->vm_private_data;
	struct exmap *exmap;
	pteval_t *leaf;
	bool is_huge;
	u64 page;

	/* The mapping of a child, or one that was to be moved, maps nothing. */
	if (!mount)
		return VM_FAULT_SIGSEGV;
	exmap = container_of(mount, struct exmap, mount);
	page = (vmf->address - mount->start) >> PAGE_SHIFT;
	leaf = pt_tree_leaf(&exmap->tree, page);
	if (leaf && READ_ONCE(*leaf) & _PAGE_PRESENT)
		return pt_mount_refault(mount, vmf);
	/* A leaf of 2 MiB may map the page, and this CPU may not have seen its entry yet. */
	if (unlikely(exmap->pool.blocks) && exmap_may_be_huge(exmap, page))
		return pt_mount_refault(mount, vmf);
	if (!exmap->zero_leaf || (vmf->flags & FAULT_FLAG_WRITE))
		return VM_FAULT_SIGSEGV;
	leaf = exmap_make_leaf(exmap, page, &is_huge);
	/* Memory may be missing for good, as the user has a limit: the CPU must not fault again. */
	if (!leaf)
		return is_huge ? VM_FAULT_NOPAGE : VM_FAULT_SIGBUS;
	cmpxchg(leaf, 0, exmap->zero_leaf);
	pt_mount_leaf_changed(mount, page);
	return pt_mount_refault(mount, vmf);
}

/*
 * Refuses a write to a page that shows zeros. Without this the core would allow the write: it takes
 * the entry for one that is read-only to report the first write.
 */
static vm_fault_t exmap_surface_write_to_zeros(struct vm_fault *vmf)
{
	struct pt_mount *mount = vmf->vma->vm_private_data;
	struct exmap *exmap = mount ? container_of(mount, struct exmap, mount) : NULL;
	pteval_t *leaf;

	if (!exmap)
		return VM_FAULT_SIGSEGV;
	leaf = pt_tree_leaf(&exmap->tree, (vmf->address - mount->start) >> PAGE_SHIFT);
	/* A frame has come there meanwhile, or nothing is there: the CPU tries again. */
	if (!leaf || READ_ONCE(*leaf) != exmap->zero_leaf)
		return VM_FAULT_NOPAGE;
	return VM_FAULT_SIGSEGV;
}

/* The rights of a surface cannot change. */
static int exmap_surface_mprotect(struct vm_area_struct *vma, unsigned long start,
				  unsigned long end, unsigned long flags)
{
	return -EACCES;
}

/*
 * Serves debuggers and /proc/PID/mem, without page tables and without a page that may be pinned. It
 * holds the frame meanwhile, as a transfer does, on surfaces of every kind.
 */
static int exmap_surface_access(struct vm_area_struct *vma, unsigned long addr, void *buffer,
				int length, int write)
{
	struct pt_mount *mount = vma->vm_private_data;
	unsigned int offset = offset_in_page(addr);
	struct exmap *exmap;
	struct page *page;

	if (!mount)
		return -EFAULT;
	exmap = container_of(mount, struct exmap, mount);
	length = min_t(int, length, PAGE_SIZE - offset);
	atomic_inc(&exmap->pool.holders);
	smp_mb__after_atomic(); /* raised before the page is read; see exmap_may_be_pinned() */
	page = exmap_transfer_hold(exmap, (addr - mount->start) >> PAGE_SHIFT);
	if (!page && (write || !exmap->zero_leaf))
		length = -EFAULT;
	else if (!page)
		memset(buffer, 0, length);
	else if (write)
		memcpy(page_address(page) + offset, buffer, length);
	else
		memcpy(buffer, page_address(page) + offset, length);
	if (page)
		put_page(page);
	atomic_dec(&exmap->pool.holders);
	return length;
}

/*
 * Only a surface that shows zeros reports first writes. If a mapping reports them, the core refuses
 * to pin it for long, for io_uring for example.
 */
static const struct vm_operations_struct exmap_surface_vm_ops = {
	.open = pt_mount_vm_open,
	.close = pt_mount_vm_close,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = exmap_surface_mprotect,
	.fault = exmap_surface_fault,
	.access = exmap_surface_access,
};

static const struct vm_operations_struct exmap_surface_with_zeros_vm_ops = {
	.open = pt_mount_vm_open,
	.close = pt_mount_vm_close,
	.may_split = pt_mount_vm_may_split,
	.mremap = pt_mount_vm_mremap,
	.mprotect = exmap_surface_mprotect,
	.fault = exmap_surface_fault,
	.pfn_mkwrite = exmap_surface_write_to_zeros,
	.access = exmap_surface_access,
};

static bool exmap_is_surface_like(const struct vm_area_struct *vma)
{
	unsigned long needed = VM_SHARED | VM_READ | VM_WRITE;

	return (vma->vm_flags & (needed | VM_EXEC)) == needed;
}

static int exmap_make_zeros(struct exmap *exmap)
{
	if (!(exmap->flags & VELLUM_EXMAP_READS_ZEROS))
		return 0;
	exmap->zeros = alloc_page(GFP_KERNEL_ACCOUNT | __GFP_ZERO);
	if (!exmap->zeros)
		return -ENOMEM;
	exmap->zero_leaf = page_to_phys(exmap->zeros) | _PAGE_SPECIAL |
			   (PT_LEAF_FLAGS & ~(_PAGE_RW | _PAGE_DIRTY));
	return 0;
}

static int exmap_first_mapping(struct exmap *exmap, u64 pages)
{
	int error;

	if (pages > EXMAP_MAX_SURFACE)
		return -EINVAL;
	/*
	 * Programs for the published interface map the surface first, and expect it to be pinnable.
	 */
	exmap->pinnable = !exmap->interface || (exmap->flags & VELLUM_EXMAP_PINNABLE);
	exmap->leaf_flags = PT_LEAF_FLAGS | (exmap->pinnable ? 0 : _PAGE_SPECIAL);
	if (exmap->flags & VELLUM_EXMAP_TRACKS)
		exmap->leaf_flags &= ~(_PAGE_ACCESSED | _PAGE_DIRTY);
	error = exmap_make_zeros(exmap);
	if (error)
		return error;
	exmap_charge_tables(exmap);
	error = pt_tree_init(&exmap->tree, pages, &exmap->source);
	if (!error)
		exmap_set_prune_mark(exmap);
	return error;
}

static int exmap_map_locked(struct exmap *exmap, struct vm_area_struct *vma)
{
	unsigned long flags = VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY | VM_NOHUGEPAGE;
	bool is_first = !exmap->tree.root;
	int error;

	error = is_first ? exmap_first_mapping(exmap, vma_pages(vma)) : 0;
	if (!error) {
		flags |= exmap->pinnable ? VM_MIXEDMAP : VM_PFNMAP | VM_IO;
		pt_vma_change_flags(vma, flags, VM_MAYEXEC);
		error = pt_mount_create(&exmap->mount, vma);
	}
	/* Until here all pages were watched. */
	if (!error && !exmap->shows)
		exmap->watched = exmap->mount.tail;
	if (!error)
		vma->vm_ops = exmap->zero_leaf ? &exmap_surface_with_zeros_vm_ops :
						 &exmap_surface_vm_ops;
	/*
	 * With other errors a command may have begun to use the tree, which stays for the next
	 * mapping.
	 */
	else if (is_first && (error == -EINVAL || !exmap->tree.root))
		exmap_surface_destroy(exmap);
	return error;
}

int exmap_map_surface(struct exmap *exmap, struct vm_area_struct *vma)
{
	int error;

	if (!exmap_is_surface_like(vma))
		return -EACCES;
	/* A virtual machine would keep using frames that belong to another process by then. */
	if (!pt_secondary_can_be_told())
		return -EOPNOTSUPP;
	if (mutex_lock_killable(&exmap->setup))
		return -EINTR;
	error = exmap_map_locked(exmap, vma);
	mutex_unlock(&exmap->setup);
	return error;
}

static void exmap_forget_frame(void *data, u64 page, pteval_t leaf)
{
	struct exmap *exmap = data;

	if (exmap_has_frame(exmap, leaf))
		frame_pool_forget(&exmap->pool, pt_leaf_pfn(leaf));
}

/* Nothing maps the surface, and nothing refers to the exmap. */
void exmap_surface_destroy(struct exmap *exmap)
{
	if (exmap->flags & VELLUM_EXMAP_NO_POOL)
		pt_tree_each_leaf(&exmap->tree, exmap_forget_frame, exmap);
	exmap_tables_destroy(exmap);
	pt_tree_destroy(&exmap->tree);
	if (exmap->zeros)
		__free_page(exmap->zeros);
	exmap->zeros = NULL;
	exmap->zero_leaf = 0;
}

int exmap_map_vector(struct exmap *exmap, struct vm_area_struct *vma, unsigned long index)
{
	if (!exmap_is_created(exmap) || index >= exmap->interfaces)
		return -ENXIO;
	if (vma->vm_end - vma->vm_start != PAGE_SIZE)
		return -EINVAL;
	if (!(vma->vm_flags & VM_SHARED) || (vma->vm_flags & VM_EXEC))
		return -EACCES;
	pt_vma_change_flags(vma, VM_DONTEXPAND | VM_DONTDUMP | VM_DONTCOPY, VM_MAYEXEC);
	return vm_insert_page(vma, vma->vm_start, virt_to_page(exmap->interface[index].vector));
}
